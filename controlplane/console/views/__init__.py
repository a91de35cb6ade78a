"""The functional core of the console: what a page says, from messages of the services, without I/O or a clock."""

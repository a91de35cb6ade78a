"""Key-encryption keys over their whole life: where they come from, how they are rotated, what is wrapped under them."""

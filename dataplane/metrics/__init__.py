"""What a node tells about itself to those who watch it: counts, latencies, and whether it is fit to serve."""

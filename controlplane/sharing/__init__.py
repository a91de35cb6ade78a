"""Sharing groups: their rows, who sees what of them, and how their salt ends when a member goes."""

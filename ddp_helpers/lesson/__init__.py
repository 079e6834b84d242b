"""What runs inside a notebook."""

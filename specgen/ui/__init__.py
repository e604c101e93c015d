"""What it looks like in the terminal."""

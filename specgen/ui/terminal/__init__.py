"""Views in the terminal."""

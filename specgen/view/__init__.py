"""What the user sees: terminal output, HTML pages and SVG pictures."""

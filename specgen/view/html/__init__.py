"""HTML pages, each in one file, that show comparisons of methods and recorded generations."""

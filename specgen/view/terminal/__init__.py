"""What the commands print in the terminal: answers, rounds, tables, reports and progress."""

"""Share help texts, a line on the screen, progress and sizes between commands; nothing heavy is imported."""

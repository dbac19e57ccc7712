"""Hold the arithmetic of training at scale, as functions of plain numbers with a source each."""

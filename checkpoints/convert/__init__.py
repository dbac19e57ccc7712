"""Convert between layouts and formats: make a plan from headers, then carry it out."""

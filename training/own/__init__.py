"""A user's own file that a recipe names, and the module that it makes, as a family of one model."""

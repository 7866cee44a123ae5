"""Selection and checks of model folders."""

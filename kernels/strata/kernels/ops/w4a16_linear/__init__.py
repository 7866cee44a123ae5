"""Linear layer with 4-bit weights: packing, kernel and operator."""

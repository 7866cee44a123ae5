"""Operations: one module each, or one folder for an operation with several files."""

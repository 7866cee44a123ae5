"""Operations: a module each, or a folder where one has several files."""

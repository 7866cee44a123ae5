"""The `strata plan` commands: options, tables, plots and reports."""

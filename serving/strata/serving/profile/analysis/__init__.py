"""Analysis of the traces of engines: steps, requests, time by cause, findings."""

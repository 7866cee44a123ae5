"""Web page of an endpoint: its static files, and the state of the platform that it shows."""

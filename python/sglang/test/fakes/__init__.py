"""Stand-ins and fixtures for tests; nothing here runs in a server."""

"""A run as a page: what is read from its directory, what it shows, and the server for it"""

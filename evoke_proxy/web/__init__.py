"""The HTTP face of the proxy: routes, the byte relay, error bodies in the client's dialect."""

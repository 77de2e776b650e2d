"""The OpenAI-compatible HTTP API of the gateway. `server.serve_http` starts it on the gateway's own event loop."""

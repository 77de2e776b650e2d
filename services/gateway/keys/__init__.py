"""API keys and tenants: a TOML document in a file or in Redis, followed while the gateway runs."""

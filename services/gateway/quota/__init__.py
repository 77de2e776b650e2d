"""How much tenants and keys may ask for, and what they asked for: rates, requests at a time, usage by day."""

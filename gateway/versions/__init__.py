"""Published versions: one durable state for all gateways of a ledger."""

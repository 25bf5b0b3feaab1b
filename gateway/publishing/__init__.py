"""Publications: how every server of the fleet comes to the same version."""

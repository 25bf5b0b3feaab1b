"""Untrusted programs, run where they can harm nobody: `choice.make_sandbox`."""

"""Headway's own contract, beside what every service of ours has."""

"""Versioned weights, both ends; knows neither trainer nor server."""

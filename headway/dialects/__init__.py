"""Dialects of other services: requests, responses and errors of OpenAI's and Anthropic's APIs."""

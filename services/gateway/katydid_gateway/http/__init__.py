"""The OpenAI HTTP API as a translation of the gateway's own requests and answers."""

"""Who is calling: exchange of API keys for tokens, the signing keys, and the door that verifies every call (I1)."""

"""Draft heads, drafting, verification, acceptance and engine formats."""

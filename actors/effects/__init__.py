"""The outside world. Importable only from actors/; everything here refuses to run inside a transaction."""

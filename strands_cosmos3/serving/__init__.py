"""The policy wire protocol: its codec, its translation to our types, a server and a client. docs/wire.md describes it."""

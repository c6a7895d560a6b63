"""The policy wire protocol: codec, conversion to our types, server and client. See docs/wire.md."""

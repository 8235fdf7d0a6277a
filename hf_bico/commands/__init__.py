"""The commands, by what they do: parse, call, print. Each imports what it needs when it runs."""

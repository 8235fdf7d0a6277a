"""Model cards: from the record alone to text and picture."""

"""Messages between nodes, and the envelope that carries them."""

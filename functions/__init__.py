"""Applications that ship with the platform; they use the public interface only."""

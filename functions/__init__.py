"""Applications that ship with the platform. They use only its public interface."""

"""Will a run fit on a GPU, and how fast can it be there: its step compiled for a device that need not be present."""

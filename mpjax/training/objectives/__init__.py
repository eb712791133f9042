"""The tasks as losses and measures, one file each; all in float32 or wider, whatever the policy."""

"""What cache nodes ask of the control plane: registration, the policy stream, usage reports."""

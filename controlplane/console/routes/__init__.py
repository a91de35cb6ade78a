"""The pages, one module for each subject; all of them are listed in ``controlplane.console.app``."""

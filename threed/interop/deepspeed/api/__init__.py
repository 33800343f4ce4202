"""The modules of DeepSpeed's API, one file each."""

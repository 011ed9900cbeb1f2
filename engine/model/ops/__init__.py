"""Where CPU and GPU may differ. Each op has one signature; its plain torch version is the oracle for a fast one."""

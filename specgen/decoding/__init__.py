"""The core: drafters, length policies, verifiers and schedules. It is handed models; it never loads one."""

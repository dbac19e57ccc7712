"""The public test harness: functions on many ranks, through a pool of workers that is reused."""

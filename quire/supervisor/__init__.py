"""`quire up`: starts the services of one machine, watches over them and ends them in order."""

-- id
return {'ok', redis.call('LRANGE', key('events', ARGV[2]), 0, -1)}

-- key, value
redis.call('HSET', key('notes'), ARGV[2], ARGV[3])
changed = true
return finish({'ok'})

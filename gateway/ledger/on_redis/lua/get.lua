-- id, '1' with the payload
local fields = redis.call('HGETALL', key('rollout', ARGV[2]))
local payload = ARGV[3] == '1' and redis.call('GET', key('payload', ARGV[2]))
return {'ok', fields, payload or ''}

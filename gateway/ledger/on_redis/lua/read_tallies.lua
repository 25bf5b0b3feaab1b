return {'ok', redis.call('GET', key('revision')) or '0', redis.call('HGETALL', key('trajectories')),
  redis.call('HGETALL', key('forgotten')), redis.call('HGETALL', key('findings'))}
